"""Environments: Python packages on top of a job's image, built once for each content as one more layer.

``requirements`` and ``project`` read what the user wrote, ``pip_settings`` reads the settings of the head's pip.
``plan`` computes the key. ``build`` runs pip in a container of the base image on the head (``inside``) and adds the
installed files to the image (``layer``).
"""
