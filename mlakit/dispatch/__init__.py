"""Which path a call gets, and why: policies, what is here, the doctor, the call itself."""
