from argparse import ArgumentParser

import pytest

from pdserve_client.bench import add_bench_flags, run_bench


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-requests=0", "num_requests is 0, must be at least 1"),
        ("--vocab-size=3", "vocab_size is 3, must be at least 4"),
    ],
)
def test_a_load_that_cannot_be_is_refused(flag: str, message: str) -> None:
    parser = ArgumentParser()
    add_bench_flags(parser)
    with pytest.raises(ValueError, match=message):
        run_bench(parser.parse_args([flag]))
