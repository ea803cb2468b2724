def fetch(item):
    return {"lamp": 40, "chair": 180}[item]
