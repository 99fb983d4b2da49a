"""What agents are asked about: search, tools, static answer sets, FrozenLake. No domain knows a
model or an engine."""
