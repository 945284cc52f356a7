"""The plugins, one folder per engine; each is entered through the engine's official entry point."""
