# Returns values whose methods run when the worker looks at them: a str that is no str, a float that spins. RIGHT: schema|env_error|timeout


class Text(str):
    def __len__(self):
        return -1

    def encode(self, *arguments):
        return b"PWNED"


class Number(float):
    def __repr__(self):
        return "1e999"



class ValueWithCodeEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        return Text("x"), Number(0.5), False, False, {}
