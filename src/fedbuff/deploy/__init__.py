"""FedBuff over a network: the same core that was simulated, driven by real clients.

Where things are:

    books, dispatch, reasons    what a run knows and what it does about it: no clock, no network, no disk
    wire                     what server and gateways say to each other
    journal, outbox          what must not be lost, on either side
    serve, clients           the two halves at work: the server's loop, and a gateway's clients
    vault, sealing           secure aggregation, on either side
    transport                what a network has to do for us
    flower, fleet, gateway, worker, superlink    Flower doing it
    watch, status, metrics, logs                 seeing a run
    init, files, certificates, processes, keep, doctor    setting one up, and keeping it going
    replay, tidy             a run once more, from its journal; what is deleted when it ends
    settings, command        [deploy], and `fedbuff deploy`
"""
