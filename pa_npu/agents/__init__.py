"""The gateway: an OpenAI-compatible server whose clients' sessions become samples, token by token what the policy wrote."""
