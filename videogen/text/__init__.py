"""One language model, three uses: it conditions video, expands prompts, and answers; its cached prefixes obey caches.policy."""
