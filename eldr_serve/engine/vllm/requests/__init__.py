"""Requests and answers of one engine in the forms of OpenAI's and Anthropic's APIs, in a replica."""
