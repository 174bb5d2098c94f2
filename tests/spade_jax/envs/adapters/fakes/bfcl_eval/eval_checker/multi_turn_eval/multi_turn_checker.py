def state_checker(mine, theirs):
    return {"valid": all(vars(mine[name]) == vars(theirs[name]) for name in theirs)}


def response_checker(mine, theirs, turn):
    return {"valid": all(result in mine for result in theirs)}
