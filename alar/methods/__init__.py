"""What ALAR is compared with: each method in a module of its own, all measured by `comparison`."""
