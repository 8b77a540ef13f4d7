"""Every way to run the step, a module each, and the registry that knows them by name."""
