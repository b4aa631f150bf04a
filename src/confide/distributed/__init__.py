"""One run on several processes, each with a part of the records: under torchrun, on one machine or on many.

    with confide.distributed.start() as ranks:
        records = confide.data.from_parquet("train/*.parquet", target="y", schema=schema, shard=ranks)
        data = ranks.private(records, schema=schema, ledger=ledger, name="patients")
        run = confide.fit(method, network, data, plan, checkpoint="DIR")

Started without torchrun the same script is one process with all records. See docs/scaling.md.
"""

from confide.distributed.ranks import Ranks, start, started_together
from confide.errors import RankLost, RanksDisagree

__all__ = ["RankLost", "Ranks", "RanksDisagree", "start", "started_together"]
