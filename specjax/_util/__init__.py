"""What every package here uses: checked arguments, errors, files, programs, processes."""
