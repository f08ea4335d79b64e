"""How the registry's tables came to be, one file a step; run by `services.registry.migrate`."""
