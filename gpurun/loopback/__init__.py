"""Pages on 127.0.0.1 for people who have the URL: `door` checks the token, `server` serves a WSGI application."""
