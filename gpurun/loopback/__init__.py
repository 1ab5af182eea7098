"""Pages on 127.0.0.1, protected by a token in the URL: `door` checks the token, `server` serves a WSGI application."""
