"""Secure aggregation for a buffer of asynchronous updates: the server adds up K updates and sees none of them.

Two ways. **Enclave**: a client adds a one-time pad to its update and seals the pad's seed to a trusted aggregator, which adds
up the same pads and hands out their sum, once, for a full buffer. **Helpers**: the pad is shared out to a committee, any U of
which can name the sum of the pads of a whole buffer, and no T of which know anything.

    fixed_point   updates as integers, and back
    pad           a one-time pad from a seed            field, coding   arithmetic mod 2³¹ − 1, and shares in it
    policy        what everybody has agreed to           sealing         HPKE, AES-GCM, signatures
    attestation   whom a client talks to                 messages        bytes on the wire
    client, server, enclave, committee                   the parties

All of it facts in, answers out: no clock, no IO; time and random bytes are arguments. A party that can't accept a message
raises `RefusedError` with the reason, and has not changed. `docs/secure-aggregation.md` has the messages and the threats.
"""
