"""Several owners who do not pool their records: each answers through a party of its own, a server adds up.

    parties = confide.federated.Sockets({"north": "north.sock", "south": "south.sock"})
    data = confide.federated.Federation(parties, trust="nobody")
    plan = confide.plan(epsilon=1, delta=1e-5, records=data.schema.records, batch=256, epochs=10)
    run = confide.fit(method, network, data, plan)

See docs/federated.md.
"""

from confide.errors import PartyLost
from confide.federated.couriers import Courier, InProcess, Sockets
from confide.federated.federation import Federation
from confide.federated.party import Party
from confide.federated.peers import Peers
from confide.federated.serving import serving

__all__ = ["Courier", "Federation", "InProcess", "Party", "PartyLost", "Peers", "Sockets", "serving"]
