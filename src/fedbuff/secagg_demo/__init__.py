"""`fedbuff secagg demo` and `fedbuff secagg bench`: one buffer in both modes, the attacks on them, and what they cost."""
