"""The read model: what a store and its runs look like, as plain structs. The command line and pages draw them."""
