"""What `everstep worker` does: load a user's files, and serve the workflows that they declare."""
