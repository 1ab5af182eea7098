"""Views of a cluster for users: the terminal, the live screen and the web page all draw the same picture.

`picture` contains the data: hosts with a cell for each GPU, and jobs, with equal hosts grouped. `lines` formats it as
lines of marked text, and each view paints the marks in its own way. Both are pure. `reading` reads a picture from the
state directory. `app` is the live screen (`rows`, `feed`), `web` the page, `tensorboard` the curves.
"""
