"""What a person or a program does to runs from outside."""
