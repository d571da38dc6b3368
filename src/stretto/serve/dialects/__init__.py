"""The protocols that clients speak. Each translates its requests to one kind of call, and answers back."""
