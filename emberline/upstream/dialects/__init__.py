"""APIs of providers: their requests, replies and streams in terms of OpenAI's."""
