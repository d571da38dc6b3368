"""Tasks, prompts, rewards and episodes."""
