"""What every other package needs: errors, specs, files, progress, memory, processes, encoded items."""
