"""Three silos as keepers."""
