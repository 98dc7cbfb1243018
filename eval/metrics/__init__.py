"""What two clips of one request differ in, as numbers; knows nothing of recipes, prompts or files."""
