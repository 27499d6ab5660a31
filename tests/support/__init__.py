"""What several suites stand on: stacks and clusters of processes, workers, engines and connectors
that tests drive, peers that do as tests say, small models.
"""
