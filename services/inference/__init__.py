"""The inference service: looped models that stop when the answer is ready, over HTTP.

`app.create_app` is the application and needs no Ray; `deploy` brings it up on Ray Serve, as the job kind `serve`.
"""
