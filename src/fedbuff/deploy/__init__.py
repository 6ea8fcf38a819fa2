"""FedBuff over a network: the same core that was simulated, driven by real clients.

Where things are:

    books, dispatch          what a run knows and what it does about it: no clock, no network, no disk
    wire                     what server and gateways say to each other
    journal, outbox          what must not be lost, on either side
    serve, clients           the two halves at work: the server's loop, and a gateway's clients
    vault, sealing           secure aggregation, on either side
    transport                what is asked of a network; Flower's is in
    flower, fleet, gateway, worker, superlink    which is all there is of Flower
    watch, status, metrics, logs                 seeing a run
    init, files, certificates, processes, keep, doctor    setting one up, and keeping it going
    replay                   a run once more, from its journal
    settings, command        [deploy], and `fedbuff deploy`
"""
