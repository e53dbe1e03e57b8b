"""Images of prompts: from files to pixels, placeholder tokens and positions on three axes."""
