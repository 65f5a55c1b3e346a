"""What every part uses: numbers and files as they come in and go out, a cache, and what is imported when."""
