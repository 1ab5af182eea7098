"""Environments: Python packages that a job has on top of its image, built once per content as one more layer.

``requirements`` and ``project`` read what the user wrote, ``pip_settings`` what the head's pip is told. ``plan`` makes
the key of it. ``build`` runs pip in a container of the base image on the head (``inside``) and adds what it installed
to the image (``layer``).
"""
