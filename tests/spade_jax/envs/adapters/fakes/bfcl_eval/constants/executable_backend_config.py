CLASS_FILE_PATH_MAPPING = {"Lamp": "bfcl_eval.apis.lamp", "Sums": "bfcl_eval.apis.sums"}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Lamp": "lamp.json", "Sums": "sums.json"}
