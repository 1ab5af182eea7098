"""What people see of a cluster: one picture, which the terminal, the live screen and the web page all draw.

`picture` has the values: hosts with a cell for each GPU, and jobs. `racks` puts hosts that are alike together. `lines`
lays both out as lines of marked text; each view paints the marks in its own way. These three are pure. `reading` reads
a picture from the state directory.
"""
