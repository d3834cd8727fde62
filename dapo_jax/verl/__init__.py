"""What an option of verl is called here, and which value it has."""
