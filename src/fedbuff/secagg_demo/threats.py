"""What secure aggregation promises and what it does not, to be printed wherever it is shown."""

ENCLAVE = (
    "Hides each update from the server operator if the enclave and its attestation root are sound and side-channel "
    "free. In this repository the enclave is SIMULATED: a separate process, no hardware protection. The server can "
    "still learn sums of K, can choose who is in a buffer and fill K-1 places with sybils, leaving one honest "
    "client exposed unless DP noise is added inside the enclave or clients are authenticated. Malicious clients can "
    "submit arbitrary updates (no range proof). Availability is not protected."
)

HELPERS = (
    "Server + up to T helpers learn only the weighted sum (semi-honest; T-private information-theoretically except "
    "PRG and AEAD). An actively malicious server is stopped from singling out a client only by the helper checks "
    "above, and only if helpers see the same list and the key directory is honest. No input validation. Weighted sums "
    "over K=10 still leak; add DP."
)
