"""The API server's door: who may ask what, and how much one request may ask for. docs/security.md is its table.

vLLM's own key guards some prefixes of paths only. This room denies by default: with a key set every route asks for it
but `/health` and `/ping`, and a route that is not in `routes.CLIENT_ROUTES` does not exist. Rooms inside import only
those before them: rules, errors, asked, hosts, keys, routes, grammars, connections, middleware.
"""
