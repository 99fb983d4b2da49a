"""The tool domain: functions and their execution, requests, Qwen3's surface form, ToolMind, and the
official BFCL check."""
