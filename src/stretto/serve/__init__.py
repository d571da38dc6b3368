"""The endpoint: programs that speak the OpenAI or Anthropic protocol call a policy, and their calls are trained on."""
