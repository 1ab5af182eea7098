"""Pages on 127.0.0.1 for whoever has the URL: `door` lets them in, `server` serves a WSGI application to them."""
