"""What is asked of the engine and what it answers: parameters, constraints, outputs, their text."""
