"""What the project's HTTP services and their clients share: batching of concurrent requests, clear refusals, retries."""
