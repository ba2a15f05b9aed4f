"""Looking at models: what they cost, and what goes on inside."""
