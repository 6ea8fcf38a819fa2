"""Learning: tasks, local training, evaluation. torch lives here only, and is imported when it is first needed."""
