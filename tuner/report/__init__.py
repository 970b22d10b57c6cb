"""What a person or a script is shown of a study."""
