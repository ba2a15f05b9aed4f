// Search runs in a web worker. Browsers refuse workers on pages that are opened as files; there, a hidden frame runs the
// worker's script. (The name of this file replaces a script that the generator would load from another site.)
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()
      inner.document.write("<!doctype html><body></body>")
      inner.document.close()
      inner.postMessage = (data) => {
        const copy = structuredClone(data) // as between a worker and its page
        setTimeout(() => this.onmessage && this.onmessage({ data: copy }))
      }
      const script = inner.document.createElement("script")
      this.loaded = new Promise((resolve) => (script.onload = resolve))
      script.src = url
      inner.document.body.append(script)
    }

    postMessage(data) {
      const inner = this.frame.contentWindow
      const copy = structuredClone(data)
      this.loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data: copy })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
