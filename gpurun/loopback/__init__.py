"""Pages on 127.0.0.1 for whoever has the URL: `door` checks the token, `server` serves a WSGI application."""
