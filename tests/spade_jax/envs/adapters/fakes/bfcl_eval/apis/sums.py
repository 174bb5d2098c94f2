import decimal


class Sums:
    def third(self, precision):
        decimal.getcontext().prec = precision
        return f"{decimal.Decimal(1) / 3}"

    def third_as_set(self):
        return f"{decimal.Decimal(1) / 3}"
