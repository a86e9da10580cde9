{{/* A role's pod. Takes root and role. */}}

{{/* Everything below /etc/hps: one projected volume, so that pods see a changed Secret. */}}
{{- define "hps.volume.etc" -}}
{{- $values := .Values -}}
name: etc
projected:
  defaultMode: 0440
  sources:
    - configMap:
        name: {{ default (include "hps.fullname" .) $values.existingConfigMap }}
        items: [{key: config.yaml, path: config.yaml}]
    {{- if $values.auth.enabled }}
    - secret:
        name: {{ include "hps.keysSecret" . }}
        items:
          - {key: keys.yaml, path: auth/keys.yaml}
          - {key: read-key, path: auth/read-key}
    {{- end }}
    {{- if $values.tls.enabled }}
    - secret:
        name: {{ $values.tls.existingSecret }}
        items:
          - {key: tls.crt, path: tls/tls.crt}
          - {key: tls.key, path: tls/tls.key}
          - {key: ca.crt, path: tls/ca.crt}
    {{- end }}
    {{- with $values.redis.existingSecret }}
    - secret:
        name: {{ . }}
        items: [{key: {{ $values.redis.passwordKey }}, path: redis/password}]
    {{- end }}
    {{- with and $values.redis.tls.enabled $values.redis.tls.existingSecret }}
    - secret:
        name: {{ . }}
        items: [{key: {{ $values.redis.tls.caKey }}, path: redis/ca.crt}]
    {{- end }}
    {{- with $values.kafka.security }}
    {{- $items := list }}
    {{- if hasPrefix "SASL_" .protocol }}
    {{- if not .username }}
    {{- $items = append $items (dict "key" .usernameKey "path" "kafka/username") }}
    {{- end }}
    {{- $items = append $items (dict "key" .passwordKey "path" "kafka/password") }}
    {{- end }}
    {{- if .certificateKey }}
    {{- $items = append $items (dict "key" .certificateKey "path" "kafka/tls.crt") }}
    {{- $items = append $items (dict "key" .keyKey "path" "kafka/tls.key") }}
    {{- end }}
    {{- $ca := dict "key" .caKey "path" "kafka/ca.crt" }}
    {{- if and .caKey (not .caSecret) }}
    {{- $items = append $items $ca }}
    {{- end }}
    {{- with $items }}
    - secret:
        name: {{ $values.kafka.security.existingSecret }}
        items: {{- toYaml . | nindent 10 }}
    {{- end }}
    {{- if and .caKey .caSecret }}
    - secret:
        name: {{ .caSecret }}
        items: {{- toYaml (list $ca) | nindent 10 }}
    {{- end }}
    {{- end }}
{{- end -}}

{{- define "hps.volume.models" -}}
name: models
{{- if .Values.models.volume }}
{{ toYaml .Values.models.volume }}
{{- else }}
emptyDir: {sizeLimit: {{ .Values.models.fetch.sizeLimit }}}
{{- end }}
{{- end -}}

{{- define "hps.mount.models" -}}
name: models
mountPath: /var/lib/hps/models
{{- if .Values.models.volume }}
readOnly: true
{{- with .Values.models.subPath }}
subPath: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "hps.probe" -}}
httpGet:
  path: {{ .probe.path }}
  port: admin
  scheme: {{ include "hps.scheme" .root | upper }}
{{ omit .probe "path" | toYaml }}
{{- end -}}

{{/* Init containers, in their order. */}}
{{- define "hps.initContainers" -}}
{{- $values := .root.Values -}}
{{- $own := index $values .role -}}
{{- if $values.models.demo }}
- name: models
  image: {{ .image }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args: [demo, --write, /var/lib/hps/models]
  securityContext: {{- toYaml $values.securityContext | nindent 4 }}
  resources: {requests: {cpu: 100m, memory: 256Mi}, limits: {memory: 512Mi}}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {{- include "hps.mount.models" .root | nindent 6 }}
{{- else if $values.models.fetch.enabled }}
{{- with $values.models.fetch }}
- name: models
  image: {{ .image }}
  {{- with .command }}
  command: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .args }}
  args: {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- toYaml $values.securityContext | nindent 4 }}
  {{- with .resources }}
  resources: {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {{- include "hps.mount.models" $.root | nindent 6 }}
{{- end }}
{{- end }}
{{- if and (eq .role "lookup") $values.lookup.checkpoints.enabled }}
- name: bootstrap
  image: {{ .image }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  # Restores the newest checkpoint if there is no database yet.
  args: [store, restore, /var/lib/hps/checkpoints, --bootstrap, --config, /etc/hps/config.yaml]
  securityContext: {{- toYaml $values.securityContext | nindent 4 }}
  resources: {requests: {cpu: 100m, memory: 256Mi}, limits: {memory: 1Gi}}
  volumeMounts:
    - {name: etc, mountPath: /etc/hps, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: data, mountPath: /var/lib/hps/data}
    - {{- include "hps.mount.checkpoints" .root | nindent 6 }}
{{- end }}
{{- with $own.initContainers }}
{{ toYaml . }}
{{- end }}
{{- if and (eq .role (include "hps.way-in" .root)) (eq $values.triton.mode "sidecar") }}
{{ include "hps.triton" .root }}
{{- end }}
{{- end -}}

{{- define "hps.mount.checkpoints" -}}
name: checkpoints
mountPath: /var/lib/hps/checkpoints
{{- with .Values.lookup.checkpoints.subPath }}
subPath: {{ . }}
{{- end }}
{{- end -}}

{{/* A sidecar in Kubernetes' sense: it is there before the server and ends after it, so that no request of a draining server
lacks it. */}}
{{- define "hps.triton" -}}
{{- $triton := .Values.triton -}}
- name: triton
  restartPolicy: Always
  {{- with $triton.image }}
  image: {{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
  imagePullPolicy: {{ .pullPolicy }}
  {{- end }}
  command: [tritonserver]
  args:
    - --model-repository=/models
    # Only for the server in the same pod: Triton requires no key.
    - --http-address=127.0.0.1
    - --http-port=9000
    - --grpc-address=127.0.0.1
    - --grpc-port=9001
    - --metrics-address=0.0.0.0
    - --metrics-port=9002
    - --disable-auto-complete-config
    {{- if eq (dig "dense" "triton" "shared_memory" "none" .Values.config) "system" }}
    - --allow-client-shm=true
    {{- end }}
    {{- with $triton.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: triton-metrics, containerPort: 9002}
  startupProbe:
    exec: {command: [curl, --fail, --silent, --output, /dev/null, "http://127.0.0.1:9000/v2/health/live"]}
    timeoutSeconds: 5
    periodSeconds: 5
    failureThreshold: 120
  livenessProbe:
    exec: {command: [curl, --fail, --silent, --output, /dev/null, "http://127.0.0.1:9000/v2/health/live"]}
    timeoutSeconds: 5
    periodSeconds: 10
    failureThreshold: 6
  securityContext: {{- toYaml .Values.securityContext | nindent 4 }}
  resources: {{- toYaml $triton.resources | nindent 4 }}
  volumeMounts:
    - name: triton-models
      mountPath: /models
      readOnly: true
      {{- with $triton.modelRepository.subPath }}
      subPath: {{ . }}
      {{- end }}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
{{- end -}}

{{- define "hps.server" -}}
{{- $values := .root.Values -}}
{{- $own := index $values .role -}}
{{- $whole := and (eq .role "lookup") (not $values.frontend.enabled) -}}
- name: {{ .role }}
  image: {{ .image }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args:
    - {{ ternary "ingest" "serve" (eq .role "ingest") }}
    - --config
    - /etc/hps/config.yaml
    {{- with $own.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $env := concat $values.extraEnv $own.extraEnv }}
  {{- $given := dict }}
  {{- range $env }}{{ $_ := set $given .name true }}{{ end }}
  {{- /* Not an argument, so that commands such as `kubectl exec … hps doctor` have it, too. */}}
  {{- $env = prepend $env (dict "name" "HPS__SERVER__ROLE" "value" (ternary "all" .role $whole)) }}
  {{- if and $values.tls.enabled (not (hasKey $given "HPS_TLS")) }}
  {{- $env = append $env (dict "name" "HPS_TLS" "value" (include "hps.tls.tools" (dict "folder" "/etc/hps/tls" "mtls" $values.tls.mtls))) }}
  {{- end }}
  {{- $grouped := hasKey (dig "updates" "kafka" dict $values.config) "group" }}
  {{- if and (eq .role "lookup") (include "hps.streams" .root) (not (or $grouped $values.existingConfigMap)) }}
  {{- /* The node's name among the readers of a Kafka that several releases may share. */}}
  {{- $pod := dict "name" "POD_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name")) }}
  {{- $group := dict "name" "HPS__UPDATES__KAFKA__GROUP" "value" (printf "%s.$(POD_NAME)" .root.Release.Namespace) }}
  {{- $env = concat (list $pod $group) $env }}
  {{- end }}
  {{- if and $values.models.uri (eq .role "lookup") (not (hasKey $given "HPS__MODELS__DOWNLOAD__FOLDER")) }}
  {{- $env = append $env (dict "name" "HPS__MODELS__DOWNLOAD__FOLDER" "value" "/var/lib/hps/data/models") }}
  {{- end }}
  {{- with $env }}
  env: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $envFrom := $values.extraEnvFrom }}
  {{- with $values.models.credentialsSecret }}
  {{- $envFrom = append $envFrom (dict "secretRef" (dict "name" .)) }}
  {{- end }}
  {{- with $envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    {{- if or $whole (eq .role "frontend") }}
    - {name: http, containerPort: 8000}
    {{- end }}
    {{- if ne .role "ingest" }}
    - {name: grpc, containerPort: 8001}
    {{- end }}
    - {name: admin, containerPort: 8002}
  startupProbe: {{- include "hps.probe" (dict "root" .root "probe" $values.probes.startup) | nindent 4 }}
  livenessProbe: {{- include "hps.probe" (dict "root" .root "probe" $values.probes.liveness) | nindent 4 }}
  readinessProbe: {{- include "hps.probe" (dict "root" .root "probe" $values.probes.readiness) | nindent 4 }}
  {{- with int $values.drain.preStopSeconds }}
  lifecycle: {preStop: {exec: {command: [sleep, {{ . | quote }}]}}}
  {{- end }}
  securityContext: {{- toYaml $values.securityContext | nindent 4 }}
  {{- $resources := deepCopy $own.resources }}
  {{- if gt (int (.gpu).count) 0 }}
  {{- $limits := default (dict) $resources.limits }}
  {{- $_ := set $resources "limits" (set $limits .gpu.resource .gpu.count) }}
  {{- end }}
  {{- with $resources }}
  resources: {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - {name: etc, mountPath: /etc/hps, readOnly: true}
    - {{- include "hps.mount.models" .root | nindent 6 }}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    {{- if eq .role "lookup" }}
    - {name: data, mountPath: /var/lib/hps/data}
    {{- if $values.lookup.checkpoints.enabled }}
    - {{- include "hps.mount.checkpoints" .root | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- with $values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "hps.pod" -}}
{{- $values := .root.Values -}}
{{- $own := index $values .role -}}
{{- $selector := include "hps.selector" . -}}
{{- $gpu := default (dict "count" 0) $own.gpu -}}
{{- $image := include "hps.image" (dict "root" .root "gpus" $gpu.count) -}}
{{- $pod := dict "root" .root "role" .role "image" $image "gpu" $gpu -}}
metadata:
  labels:
    {{- include "hps.podLabels" . | nindent 4 }}
    # Marks servers, in contrast to the release's jobs.
    hps.metrics: "true"
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .role }}
    {{- if not $values.existingConfigMap }}
    # A changed configuration replaces the pods, one after the other.
    checksum/config: {{ include "hps.config" .root | sha256sum }}
    {{- end }}
    {{- with merge (dict) $own.podAnnotations $values.commonAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "hps.serviceAccount" .root }}
  automountServiceAccountToken: {{ $values.serviceAccount.automountToken }}
  # Kubernetes' service variables, such as HPS_PORT, would look like settings.
  enableServiceLinks: false
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $gpu.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- $drain := $values.drain }}
  terminationGracePeriodSeconds: {{ default (add $drain.preStopSeconds (ceil $drain.delaySeconds) (ceil $drain.seconds) 15) $own.terminationGracePeriodSeconds | int }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with include "hps.initContainers" $pod | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    {{- include "hps.server" $pod | nindent 4 }}
    {{- with $own.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - {{- include "hps.volume.etc" .root | nindent 6 }}
    - {{- include "hps.volume.models" .root | nindent 6 }}
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $own.shmSize }}}}
    {{- if eq .role "lookup" }}
    {{- if not $values.lookup.persistence.enabled }}
    - {name: data, emptyDir: {sizeLimit: {{ $values.lookup.persistence.size }}}}
    {{- end }}
    {{- if $values.lookup.checkpoints.enabled }}
    - name: checkpoints
      {{- toYaml $values.lookup.checkpoints.volume | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- if and (eq .role (include "hps.way-in" .root)) (eq $values.triton.mode "sidecar") }}
    - name: triton-models
      {{- toYaml $values.triton.modelRepository.volume | nindent 6 }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "hps.placement" (dict "root" .root "own" $own) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $own.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- $spread := $values.topologySpreadConstraints }}
    {{- if not $spread }}
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    {{- $spread = append $spread (dict "maxSkew" 1 "topologyKey" . "whenUnsatisfiable" "ScheduleAnyway") }}
    {{- end }}
    {{- end }}
    {{- range $spread }}
    - {{- toYaml (hasKey . "labelSelector" | ternary . (set (deepCopy .) "labelSelector" (dict "matchLabels" ($selector | fromYaml)))) | nindent 6 }}
    {{- end }}
{{- end -}}
