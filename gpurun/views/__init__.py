"""Views of a cluster for users: the terminal, the live screen and the web page all draw the same picture.

`picture` contains the data: hosts with a cell for each GPU, and jobs. `racks` groups equal hosts. `lines` formats both
as lines of marked text, and each view paints the marks in its own way. These three modules are pure. `reading` reads a
picture from the state directory.
"""
