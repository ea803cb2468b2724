"""The faces: the app, its handles, the blocking app, the client, the frameworks' store."""
